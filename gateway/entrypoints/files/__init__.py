"""The files and uploads APIs: bodies of any size that go to the broker chunk by chunk.

upload_body        reads a request's body in time and within its limit
multipart_reader   cuts a multipart body into its fields and its file (pure)
transfers          stores the file of a form while it comes in; who may send and read one
file_routes        `/v1/files`
upload_routes      `/v1/uploads`
openapi_paths      what the OpenAPI document says of both (pure)
"""
