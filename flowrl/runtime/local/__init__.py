"""This process and the processes of this machine: engines, and the checks of what can run here."""
