"""Conversation state: responses and conversations that the gateway keeps between requests.

Replicas stay stateless. The gateway puts the earlier items of a conversation before a request's own
(`turn`), keeps the answer when it has ended, and answers the routes that look at what is kept
(`routes`).
"""
