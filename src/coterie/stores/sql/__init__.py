"""The store port in SQL that SQLite and PostgreSQL share."""
