"""Tasks, such as detection, decode the outputs of a model. Each task has a module that registers it.

The result is an answer, such as labels with scores or boxes in pixels of the picture. `answerer` combines the
task and the preprocessing of a package.
"""
