package env

// Variables that define the place of a process in a job. `chorus run` sets them
// for each worker; set them yourself only to start workers by hand.
var (
	Job = &Var{"CHORUS_JOB", "text", "",
		"Name of the job. Processes with different names never join each other. For a job on one host, `chorus run` generates a name."}
	Rank = &Var{"CHORUS_RANK", "number", "",
		"Set by `chorus run`: rank of this process, 0 to CHORUS_WORLD_SIZE-1."}
	WorldSize = &Var{"CHORUS_WORLD_SIZE", "number", "",
		"Set by `chorus run`: world size, the number of processes in the job. Set it yourself in a Kubernetes indexed Job."}
	LocalRank = &Var{"CHORUS_LOCAL_RANK", "number", "",
		"Set by `chorus run`: rank of this process on its host, which is also the ordinal of its device."}
	LocalSize = &Var{"CHORUS_LOCAL_SIZE", "number", "",
		"Set by `chorus run`: number of processes of the job on this host."}
	Node = &Var{"CHORUS_NODE", "number", "",
		"Set by `chorus run`: index of this host, 0 to CHORUS_NODES-1."}
	Nodes = &Var{"CHORUS_NODES", "number", "",
		"Set by `chorus run`: number of hosts in the job."}
	Epoch = &Var{"CHORUS_EPOCH", "number", "",
		"Set by `chorus run`: epoch of the job in which it started this process, from 1 on."}
	RestartCount = &Var{"CHORUS_RESTART_COUNT", "number", "",
		"Set by `chorus run`: how often it has started the processes of the job again (TORCHELASTIC_RESTART_COUNT)."}
	Addr = &Var{"CHORUS_ADDR", "text", "",
		"Set by `chorus run`: host:port of the job's coordinator."}
	Token = &Var{"CHORUS_TOKEN", "text", "",
		"Set by `chorus run`: hexadecimal key for the mutual authentication of workers and the coordinator. It does not permit a process to act as a launcher, and is not valid in the next run of the job."}
)

// Settings of `chorus run` and cluster.Attach.
var (
	Launcher = &Var{"CHORUS_LAUNCHER", "text", "auto",
		"Launcher whose variables cluster.Attach reads: `chorus`, `torchrun`, `openmpi`, `pmi` (MPICH, Intel MPI), `slurm`, `kubernetes`, `none` (a world of one process), or `auto`: the first of these that has started several processes, or else one."}
	Seeds = &Var{"CHORUS_SEEDS", "text", "",
		"Comma-separated host:port addresses of the hosts that may coordinate the job at its start; the same list on every host. With MPI or Kubernetes, the address of the process with rank 0."}
	Bind = &Var{"CHORUS_BIND", "text", "",
		"IP address, or IP:port, that `chorus run` listens on. Default: the loopback for a job on one host, the seed's own address for several hosts."}
	Advertise = &Var{"CHORUS_ADVERTISE", "text", "",
		"IP address, or IP:port, that other hosts use to reach this host, if it differs from the address that it listens on."}
	HostName = &Var{"CHORUS_HOST", "text", "",
		"Name of this host in messages and in the order of ranks. Default: the system's host name."}
	SecretFile = &Var{"CHORUS_SECRET_FILE", "text", "",
		"File with the job's shared secret of at least 16 bytes, readable by its owner only. A job on several hosts needs a secret, as do processes on one host in different network namespaces. Without a secret, the processes of a job on one host communicate through a Unix socket that only processes of the same user and of root can use."}
	Insecure = &Var{"CHORUS_INSECURE", "yes/no", "no",
		"`yes` permits a job without a secret, and without a check of the user on one host: anyone who can reach its port can join."}
	JoinTimeout = &Var{"CHORUS_JOIN_TIMEOUT", "duration", "5m",
		"Time to wait for all processes of the job. After that, the join fails with a list of the missing processes."}
	CallTimeout = &Var{"CHORUS_CALL_TIMEOUT", "duration", "5m",
		"Deadline of a store call or barrier whose context has no deadline."}
	Heartbeat = &Var{"CHORUS_HEARTBEAT", "duration", "500ms",
		"Interval of the heartbeats between each process and the coordinator. The coordinator's value applies to all processes."}
	LostAfter = &Var{"CHORUS_LOST_AFTER", "duration", "3s",
		"Silence after which a process is declared lost. The coordinator's value applies to all processes."}
	RevokeTimeout = &Var{"CHORUS_REVOKE_TIMEOUT", "duration", "15s",
		"Time for the function of cluster.Run to return after its epoch has ended. `chorus run` kills a process that takes longer. The coordinator's value applies to all processes."}
	DrainTimeout = &Var{"CHORUS_DRAIN_TIMEOUT", "duration", "30s",
		"Time for the ranks to come to the end of a step if hosts or processes join or leave. After that, the epoch ends in the middle of the step. The coordinator's value applies."}
	Agent = &Var{"CHORUS_AGENT", "text", "",
		"Set by `chorus run`: identifies the launcher that started this process."}
	AgentAddr = &Var{"CHORUS_AGENT_ADDR", "text", "",
		"Set by `chorus run` in a job on several hosts: address at which the launcher of this process tells it who coordinates the job."}
	Backoff = &Var{"CHORUS_BACKOFF", "duration", "1s",
		"Time before `chorus run` starts processes again after the second failure in a row. It doubles with each further failure, to at most 64 times its value; processes that ran for five minutes count as good. The first restart follows at once. It is also the unit for the exclusion of hosts that fail again and again: see package cluster."}
	Gossip = &Var{"CHORUS_GOSSIP", "yes/no", "yes",
		"`no` disables gossip between the hosts of a job. Reports of lost hosts then say less, and broken paths between two hosts are not found."}
	Grace = &Var{"CHORUS_GRACE", "duration", "10s",
		"Time from the failure of a worker until `chorus run` asks the other workers to stop, and again until it kills them."}
	LogDir = &Var{"CHORUS_LOG_DIR", "text", "",
		"Directory for a copy of each rank's output, in <dir>/<job>/rank-<n>.out and .err."}
	Metrics = &Var{"CHORUS_METRICS", "text", "",
		"host:port at which `chorus run` serves Prometheus metrics of its host's ranks at `/metrics`, and a live web page of the job at `/`, such as `127.0.0.1:9400`. Default: off. Everyone who reaches the address can read them: choose an address other than the loopback only in a trusted network. An address without a host is refused."}
)

// clusterVars are the variables of package cluster and `chorus run`.
var clusterVars = []*Var{Job, Rank, WorldSize, LocalRank, LocalSize, Node, Nodes, Epoch, RestartCount, Agent, AgentAddr, Addr, Token,
	Launcher, Seeds, Bind, Advertise, HostName, SecretFile, Insecure, JoinTimeout, CallTimeout,
	Heartbeat, LostAfter, RevokeTimeout, DrainTimeout, Backoff, Gossip, Grace, LogDir, Metrics}
