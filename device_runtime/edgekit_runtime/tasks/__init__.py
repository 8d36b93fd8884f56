"""What a model's outputs mean: a module for each task, which registers its record.

A task decodes outputs to an answer that people read: labels with scores, boxes in the picture's own pixels.
`answerer` joins it with the preprocessing of a package.
"""
