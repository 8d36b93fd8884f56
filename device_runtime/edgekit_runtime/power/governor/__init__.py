"""The governor: chooses settings of models so that limits of power, heat and battery hold."""
