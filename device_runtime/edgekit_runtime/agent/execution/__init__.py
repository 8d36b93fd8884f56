"""Steps of an update, carried out on the models of this device."""
