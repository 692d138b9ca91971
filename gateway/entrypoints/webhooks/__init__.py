"""`/v1/webhook_endpoints`: who is told of events; `millstream jobs` does the telling.

endpoint_routes  create, show, list, change and delete endpoints, rotate secrets; types of events
delivery_routes  test an endpoint, show what was sent to it, and send it again
openapi_paths    what the OpenAPI document says of them
"""
