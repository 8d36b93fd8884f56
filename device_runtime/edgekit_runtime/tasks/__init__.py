"""Tasks give the outputs of a model a meaning. Each task has a module, which registers its record.

A task decodes outputs to an answer, such as labels with scores or boxes in pixels of the picture. `answerer`
combines the task and the preprocessing of a package.
"""
