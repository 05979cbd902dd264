"""Access control: keys with scopes and tenants, and the rules for a service without keys."""
