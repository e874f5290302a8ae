"""The figures of the EasyScale paper (SC 2023)."""
