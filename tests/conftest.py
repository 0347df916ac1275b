"""Eight virtual CPU devices, so that sharding is tested without an accelerator."""

import os

FLAG = '--xla_force_host_platform_device_count=8'
os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {FLAG}'.strip()
os.environ['HF_HUB_OFFLINE'] = '1'
