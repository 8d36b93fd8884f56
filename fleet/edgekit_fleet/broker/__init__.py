"""The broker: mosquitto as a child of the manager, and what other brokers really do."""
