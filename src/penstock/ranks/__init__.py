"""Messages between ranks: transports, process groups, agreement."""
