"""Bookings that the schedulers and leases of one machine share."""
