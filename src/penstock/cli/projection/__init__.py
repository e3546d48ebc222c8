"""Commands that look ahead: `penstock project` and `penstock curve`."""
