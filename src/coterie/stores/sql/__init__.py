"""What both engines share: transitions written once, in SQL that both understand."""
