"""The deciding part: prompt → blocks → index → policy.

Pure: no I/O, no clock, no logging, no asyncio. Time comes in as `now_s` (monotonic seconds), randomness as a
`Random`. The proxy, the simulator and anyone's script run the same code.
"""
