"""Tests of the modules directly in service/. Its packages have other folders."""
