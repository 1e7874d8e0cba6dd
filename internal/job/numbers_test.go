package job

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestNumbersOfSECURITY compares limits with the numbers that SECURITY.md promises: other tests use the names of the limits.
func TestNumbersOfSECURITY(t *testing.T) {
	page, err := os.ReadFile("../../SECURITY.md")
	require.NoError(t, err)
	for text, limit := range map[string][2]int{
		"at most 256 connections that have sent no valid first message":   {256, stageLimits[stageHello]},
		"At most 1,024 connections whose first message proves the secret": {1024, stageLimits[stageProof]},
		"remembered (the last 4,096)":                                     {4096, newConnLimiter().hellos.most},
		"at most 1,024 connections of processes that have a token":        {1024, maxUnregistered},
		"reads at most 64 KiB of a frame from a process":                  {64 << 10, maxUnregisteredFrame},
		"keeps at most 64 MiB of messages":                                {64 << 20, maxUnackedBytes},
		"and 8 MiB for a worker":                                          {8 << 20, maxWorkerUnackedBytes},
		"cuts it to 4 KiB":                                                {4 << 10, MaxText},
		"A record of a worker has at most 64 KiB":                         {64 << 10, maxWorkerRecord},
		"at most 4,096 members with values":                               {4096, MaxEnlisted},
		"values of 16 KiB":                                                {16 << 10, MaxEnlistedBytes},
		"it remembers 64 members that have gone":                          {64, maxDepartures},
		"more than 2,000 a second":                                        {2000, packetsPerSecond},
		"at most 512 KiB of a stream":                                     {512 << 10, maxGossipStream},
		"at most 16 streams at a time":                                    {16, maxGossipStreams},
		"The store keeps at most 64 MiB":                                  {64 << 20, MaxStoreBytes},
		"in at most 4,096 calls":                                          {4096, MaxWaits},
		"for at most 65,536 keys":                                         {65536, MaxWaitKeys},
		"a call has at most 65,536 keys":                                  {65536, MaxCallKeys},
		"the reports of a job have at most 16 MiB":                        {16 << 20, maxReports},
		"At most 16 lines in 5 s":                                         {16, maxRefused},
	} {
		require.True(t, strings.Contains(string(page), text), text)
		require.Equal(t, limit[0], limit[1], text)
	}
}
