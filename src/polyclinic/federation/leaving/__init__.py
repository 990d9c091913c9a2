"""What leaves a site: parcels, the gate, the policy, the ledger, budgets, codecs and sealing."""
