"""What the page's files tell browsers to refuse."""

from tests.support.gateways import cell


async def test_no_other_site_can_frame_the_page_or_have_it_run_something_else(
    nats_url: str,
) -> None:
    """Whoever has entered a key there must not be tricked by a site around it."""
    async with cell(nats_url) as (gateway,):
        for path in ("/", "/page/app.js", "/page/style.css", "/page/index.html"):
            headers = (await gateway.request("GET", path, key=None)).headers
            policy = headers["content-security-policy"].split("; ")
            assert policy == [
                "default-src 'self'",
                "base-uri 'none'",
                "form-action 'self'",
                "frame-ancestors 'none'",
                "object-src 'none'",
            ], path
            assert headers["x-content-type-options"] == "nosniff", path
