"""Options of `pytest hil`; `edgekit hil run` names the plugin itself."""

pytest_plugins = ["edgekit_hil.tests.plugin"]
