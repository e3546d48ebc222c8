"""From schedule to schedule: plain functions that leave their input as it was."""
