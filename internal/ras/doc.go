// Package ras asks NCCL's RAS service for the state of a job's communicators, and says which of
// their ranks are silent, failed or behind. NCCL 2.24 and newer run the service in each process;
// its answer is JSON from NCCL 2.28.7 on. Any process of the host may listen on the service's port:
// Decode validates the answer, and no text of it reaches a message without plain.Text.
package ras
