"""Programs that run line by line (`executor=eager`)."""
