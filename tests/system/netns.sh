# Three namespaces in a row: here (10.1.0.1), a router, and there (10.2.0.2). $1 is what the last hop does to packets
# above 1,280 bytes: "report" has the router say so, "swallow" loses them without a word, "slow" lets them pass, but
# only 4 Mbit/s of all. The rest is the program that runs here; it can reach the other end with $THERE.
set -e
mount -t tmpfs none /run
mkdir /run/netns
ip netns add router
ip netns add there
ip link set lo up
ip link add near type veth peer name west netns router
ip -n router link add east type veth peer name far netns there
ip addr add 10.1.0.1/24 dev near
ip -n router addr add 10.1.0.2/24 dev west
ip -n router addr add 10.2.0.1/24 dev east
ip -n there addr add 10.2.0.2/24 dev far
ip link set near up
ip -n router link set west up
ip -n router link set east up
ip -n there link set far up
ip route add default via 10.1.0.2
ip -n there route add default via 10.2.0.1
nsenter --net=/run/netns/router sh -c 'echo 1 > /proc/sys/net/ipv4/ip_forward'
case $1 in
report) ip -n router link set east mtu 1280 && ip -n there link set far mtu 1280 ;;
swallow) ip -n there link set far mtu 1280 ;;
slow) nsenter --net=/run/netns/router tc qdisc add dev east root tbf rate 4mbit burst 3000 limit 6000 ;;
esac
shift
THERE="nsenter --net=/run/netns/there" exec "$@"
