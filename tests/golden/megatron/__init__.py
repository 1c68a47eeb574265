"""What the real Megatron-Core computes: gradients of every loss channel, and logs."""
