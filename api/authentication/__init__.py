"""Authenticates clients by API key, certificate or a token of an identity provider.

authenticator      a credential becomes a principal; what it may do is kept current
principal_watches  tells open connections and running streams when their principal ends
oidc_settings      the settings of an identity provider: issuer, audience, mapping of claims
token_claims       checks a token's claims and maps them to a tenant and scopes
key_set            an identity provider's public keys, from its JSON
key_set_cache      fetches them, and keeps the last good ones
identity_provider  all of it for one issuer: a token becomes a verified one
"""
