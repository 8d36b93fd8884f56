"""The broker: mosquitto as a child process of the manager, and checks of other brokers."""
