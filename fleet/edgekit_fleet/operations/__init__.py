"""Operations on a fleet, used by the commands, the HTTP interface and the console; one file for each noun."""
