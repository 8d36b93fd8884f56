"""The broker: mosquitto as a child of the manager, and checks of other brokers."""
