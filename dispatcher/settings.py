"""Settings of `millstream dispatcher`."""

from streams.base_settings import ServiceSettings


class DispatcherSettings(ServiceSettings):
    """Settings of one dispatcher."""

    user_class = "dispatcher"
