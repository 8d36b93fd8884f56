"""Emulates a slow device, a server and a link on one machine. All measurements are labelled `emulated`."""
