"""`segue decisions`: where requests went and why, from the recorded facts; and whether the policy still decides so."""
