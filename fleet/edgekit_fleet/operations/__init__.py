"""What commands do, and later the HTTP interface: functions over the store, one file a noun."""
