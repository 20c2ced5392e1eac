"""An embedded fleet of simulated vLLM servers over real HTTP.

What is simulated is the time a GPU would take and the text a model would write. What is real is everything a
router can see: the wire formats, a prefix cache of finite size with vLLM's rules of reuse and eviction,
continuous batching, queueing, preemption, metrics, disconnects.

`engine` is pure: time is an argument, so it runs on virtual time too. `server` puts it behind HTTP. The rest is the
demonstration: a workload, a client that measures, a stand of fleet and router, and the report.
"""
