"""Connects to a fleet's hosts over SSH, reads their facts, sets them up and checks them. No other
package uses SSH.
"""
