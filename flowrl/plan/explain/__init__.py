"""Why a plan is as it is, what it takes for granted, and what would be better."""
