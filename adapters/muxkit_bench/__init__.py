"""`muxkit bench`: what does a message cost, and a round trip, beside what others charge for it?

Both ends of everybody who takes part are processes of their own, which load `bench_work` and nothing else of this
package; so this file imports nothing.
"""
