"""Drivers that let one benchmark run measure other stores beside kvtide."""
