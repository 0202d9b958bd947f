class Console:
    def __init__(self, g): self.clients=[]
    def opened(self,*a): pass
    async def received(self,*a): pass
    def closed(self,*a): pass
    def tick(self,*a): pass
