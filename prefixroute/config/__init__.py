"""Settings: what there is (`settings`), and how it is read from file, environment and command line (`load`)."""

from prefixroute.config.load import instances_from_urls, instances_in_file, load_settings, require_instances
from prefixroute.config.routing import ExpectedLatencySettings, RoutingSettings, Strategy
from prefixroute.config.secrets import admin_token, api_key
from prefixroute.config.settings import HealthSettings, InstanceSettings, LogSettings, Settings

__all__ = [
    "ExpectedLatencySettings",
    "HealthSettings",
    "InstanceSettings",
    "LogSettings",
    "RoutingSettings",
    "Settings",
    "Strategy",
    "admin_token",
    "api_key",
    "instances_from_urls",
    "instances_in_file",
    "load_settings",
    "require_instances",
]
