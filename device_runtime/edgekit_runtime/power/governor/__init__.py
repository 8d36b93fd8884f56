"""The governor, which chooses the settings of models to enforce limits of power, heat and battery."""
