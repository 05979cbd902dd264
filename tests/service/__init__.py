"""Tests of the modules directly in service/. Its packages have folders beside this one."""
