"""Connects to the hosts of a fleet, reads their facts, sets them up and checks them. No other
package uses SSH.
"""
