// Package job is the protocol of jobs: the coordinator that decides, the agents in the launchers of the hosts, the
// links between processes, the store, the choice of a coordinator, and gossip. Package cluster is its face for the
// processes of a job, and package launch for launchers.
//
// The decisions are functions of events and time, without goroutines, locks, connections, files and clocks:
//   - coordinator.go, hosts.go, epoch.go, failure.go: a coordinator
//   - choice.go, voter.go, quorum.go: a host that chooses or follows a coordinator
//   - record.go: what they tell each other
//
// All other files are the shell around them, which turns connections, messages and one timer into events, and carries
// out actions (server.go, conn.go, election.go, agent.go).
package job
