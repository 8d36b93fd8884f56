"""Makes `tests` this folder: a wheel in the environment (gmqtt) brings a package of the same name."""
