"""The endpoints of the HTTP interface, one module for each subject, and the table of all endpoints."""
