"""Tests a package in a child process before it is opened for the first time on a machine."""
