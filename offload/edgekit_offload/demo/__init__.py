"""The demo: a slow device, a server and a changing link on one machine, and what offloading does there."""
