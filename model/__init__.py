"""The networks: two towers, what joins them, and their siblings. Imports nothing of the other
floors."""
