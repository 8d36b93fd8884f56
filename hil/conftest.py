"""Loads the plugin for `pytest hil`. `edgekit hil run` loads it without this file."""

pytest_plugins = ["edgekit_hil.tests.plugin"]
