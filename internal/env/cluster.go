package env

// What a process may be told about its place in a job. `chorus run` sets the
// first group for each worker; a user sets them only to run workers by hand.
var (
	Job = &Var{"CHORUS_JOB", "text", "",
		"The job's name; processes with different names never join each other. `chorus run` makes one up for a job on one host."}
	Rank = &Var{"CHORUS_RANK", "number", "",
		"Set by `chorus run`: this process's rank, 0 to CHORUS_WORLD_SIZE-1."}
	WorldSize = &Var{"CHORUS_WORLD_SIZE", "number", "",
		"Set by `chorus run`: how many processes the job has. In a Kubernetes indexed Job the user sets it."}
	LocalRank = &Var{"CHORUS_LOCAL_RANK", "number", "",
		"Set by `chorus run`: this process's rank among those of its host, which is also the ordinal of its device."}
	LocalSize = &Var{"CHORUS_LOCAL_SIZE", "number", "",
		"Set by `chorus run`: how many processes of the job this host has."}
	Node = &Var{"CHORUS_NODE", "number", "",
		"Set by `chorus run`: this host's number, 0 to CHORUS_NODES-1."}
	Nodes = &Var{"CHORUS_NODES", "number", "",
		"Set by `chorus run`: how many hosts the job has."}
	Addr = &Var{"CHORUS_ADDR", "text", "",
		"Set by `chorus run`: host:port of the job's coordinator."}
	Token = &Var{"CHORUS_TOKEN", "text", "",
		"Set by `chorus run`: the key of the job's workers, in hexadecimal, with which a worker and the coordinator prove to each other that they belong to the job. It does not make a process a launcher."}
)

// What a user may set for `chorus run` and cluster.Attach.
var (
	Launcher = &Var{"CHORUS_LAUNCHER", "text", "auto",
		"Whose variables cluster.Attach believes: `chorus`, `torchrun`, `slurm`, `openmpi`, `pmi`, `kubernetes`, `none` (a world of one), or `auto`, the first of these that is set."}
	Seeds = &Var{"CHORUS_SEEDS", "text", "",
		"Comma-separated host:port of the hosts that may coordinate the job; the same list on every host. Under MPI or Kubernetes, the address of rank 0's process."}
	Bind = &Var{"CHORUS_BIND", "text", "",
		"IP address, or IP:port, on which `chorus run` listens; unset means the loopback for one host and the seed's own address for several."}
	Advertise = &Var{"CHORUS_ADVERTISE", "text", "",
		"IP address, or IP:port, under which other hosts reach this one, when it is not the one it listens on."}
	HostName = &Var{"CHORUS_HOST", "text", "",
		"This host's name in ranks' order and in messages; unset means the system's."}
	SecretFile = &Var{"CHORUS_SECRET_FILE", "text", "",
		"A file with the job's shared secret, at least 16 bytes, readable by its owner only. A job on several hosts needs one, and processes on one host that do not share a network namespace. Without one, the processes of a job on one host meet at a Unix socket that only this user's processes and root's can use."}
	Insecure = &Var{"CHORUS_INSECURE", "yes/no", "no",
		"`yes` lets a job run without a secret, and without a check of the user on one host: anyone who reaches its port may join it."}
	JoinTimeout = &Var{"CHORUS_JOIN_TIMEOUT", "duration", "5m",
		"How long to wait for every process of the job before giving up with the list of the missing."}
	CallTimeout = &Var{"CHORUS_CALL_TIMEOUT", "duration", "5m",
		"The deadline of a store call or barrier whose context has none."}
	Heartbeat = &Var{"CHORUS_HEARTBEAT", "duration", "500ms",
		"How often a process tells the coordinator that it is alive; the coordinator's value holds for all."}
	LostAfter = &Var{"CHORUS_LOST_AFTER", "duration", "3s",
		"How long a process may be silent before it is declared lost; the coordinator's value holds for all."}
	Gossip = &Var{"CHORUS_GOSSIP", "yes/no", "yes",
		"`no` turns off the gossip between the hosts of a job; then only the seeds lead to the coordinator."}
	Grace = &Var{"CHORUS_GRACE", "duration", "10s",
		"How long `chorus run`, when a worker fails, waits for the others to end by themselves before it asks them to stop, and from asking until it kills them."}
	LogDir = &Var{"CHORUS_LOG_DIR", "text", "",
		"Where `chorus run` also writes each rank's output, as <dir>/<job>/rank-<n>.out and .err."}
)

// clusterVars are the variables of package cluster and `chorus run`.
var clusterVars = []*Var{Job, Rank, WorldSize, LocalRank, LocalSize, Node, Nodes, Addr, Token,
	Launcher, Seeds, Bind, Advertise, HostName, SecretFile, Insecure, JoinTimeout, CallTimeout,
	Heartbeat, LostAfter, Gossip, Grace, LogDir}
