"""Settings of `millstream jobs`."""

from streams.base_settings import ServiceSettings


class JobsSettings(ServiceSettings):
    """Settings of one jobs process."""
